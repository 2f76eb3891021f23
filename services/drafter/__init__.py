"""The drafter service: families, their loaders, growth on the device."""
