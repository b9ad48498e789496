"""The decoder's layers, each written once over the operations of a device."""
