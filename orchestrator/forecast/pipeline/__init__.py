"""How a network is cut over hosts: `chain` is what is cut, `clock` tells how long an update takes, `solve` chooses."""
