"""Proto messages <-> domain values: the only code that touches fields of generated messages."""
