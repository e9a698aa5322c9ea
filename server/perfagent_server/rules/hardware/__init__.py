"""Rules on the devices and what connects them."""
