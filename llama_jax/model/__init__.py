"""The model: configuration and parameters applied by `ops`; the only subpackage that knows the whole architecture."""
