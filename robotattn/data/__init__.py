"""Demonstrations: recording them, storing them, checking them, and cutting training windows out of them."""
