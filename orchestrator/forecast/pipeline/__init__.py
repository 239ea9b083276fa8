"""How a network is cut over hosts: `block_costs` is what is cut, `clock` tells how long an update takes, `solve`
chooses."""
