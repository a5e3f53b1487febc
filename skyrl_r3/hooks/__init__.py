"""The replacements, one module for each place in SkyRL.

A hook is a pure factory, ``factory(original) -> replacement``: it wraps the function it is given and knows nothing of
how that is found or put back. Replacements take what they need by parameter name, and call the original for
everything that is not theirs.
"""
