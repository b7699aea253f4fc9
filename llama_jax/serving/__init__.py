"""Serving: many requests at once on the functions of `inference`, with an exact prefix cache, and its interfaces."""
