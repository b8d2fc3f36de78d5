"""Layer 2: hostfiles, filters, hosts, slots and ranks. Pure: no sockets, no processes."""
