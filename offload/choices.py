"""Words that settings may be, for commands that must not load torch to know them."""

STATE_DTYPES = ("fp32", "bf16", "int8")
PLACES = ("auto", "device", "host", "disk")
ORDERS = ("horizontal", "layer")
