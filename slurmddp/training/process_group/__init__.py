"""How ranks meet: device, processors, rendezvous, collectives."""
