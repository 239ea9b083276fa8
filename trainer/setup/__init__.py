"""How a run begins: settings, device, data, network and strategy become one value, a `Run`."""
