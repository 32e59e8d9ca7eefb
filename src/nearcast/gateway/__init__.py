"""The gateway process: listeners for clients, links to brokers and the controller, around :mod:`nearcast.fabric.gateway`."""
