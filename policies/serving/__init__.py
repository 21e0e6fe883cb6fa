"""Policies over the network: server, client, messages."""
