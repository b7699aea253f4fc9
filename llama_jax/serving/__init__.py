"""Serving: continuous batching with the functions of `inference`, an exact prefix cache, and HTTP and offline interfaces."""
