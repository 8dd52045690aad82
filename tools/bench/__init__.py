"""The cost of the MTP objective beside unpatched Megatron-Core: ``python -m tools.bench --help``.

Both trees are imported into one process (`trees`) and measured in turn (`timing`), so that what else
the machine does falls on both alike. One module per section of the report: `objective`, `messages`,
`syncs`, `step`, `accuracy`, `roofline`. Each returns rows (`results`); `growth` fits exponents to
them, `plots` draws them, `docs` writes them into docs/performance.md.
"""
