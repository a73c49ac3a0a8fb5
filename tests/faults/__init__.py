"""The fault programme: faults drawn from a seed, put into real ranks, and how every one of them ends."""
