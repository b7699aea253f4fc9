"""The model: applies `ops` with a configuration and parameters; the only subpackage that knows the whole architecture."""
