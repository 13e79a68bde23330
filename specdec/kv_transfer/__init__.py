"""Key-value blocks beyond the device's cache: the connector interface, host memory, disk and shared pools."""
