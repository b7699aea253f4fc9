"""Parameter leaves that replace arrays: quantized and adapted weights."""
