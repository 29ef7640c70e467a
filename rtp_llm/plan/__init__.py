"""Slots, rules, pieces and their join into one checked plan. Pure: no I/O, no process groups."""
