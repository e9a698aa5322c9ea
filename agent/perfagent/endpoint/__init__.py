"""Where a server is, and how a command proves to be its administrator's. For all packages."""
