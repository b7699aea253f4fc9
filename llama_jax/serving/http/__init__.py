"""The HTTP server of an engine: OpenAI's completions and chat, metrics, and a page. Needs the extra `serve`."""
