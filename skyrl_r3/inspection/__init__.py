"""``skyrl-r3 inspect``: what is in a saved reply, or in saved routes.

Bottom up: ``files`` (bytes to arrays), ``facts`` (what they say, as data), ``report`` and ``heatmap`` (for people).
"""
