"""The HTTP server of an engine: OpenAI's completions and chat APIs, metrics, and a web page. Needs the extra `serve`."""
