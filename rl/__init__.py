"""The loop, its mathematics, and the ground floor that every room stands on."""
