"""The commands of ``skyrl-r3``, a module each.

What a command works out is in the modules below it; here are its options, what it prints and how it exits: 0 when all
is well, 1 when something is found to be wrong, 2 when it was called wrongly.
"""
