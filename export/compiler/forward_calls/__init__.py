"""Calls in a model's forward that are replaced before it is traced: dropout, attention, recurrent layers."""
