MICROBATCHES = 2  # of a step, dealt to the data-parallel ranks
