"""Behind tools/fork.py: the pinned base, the patch series, and the trees made from both."""
