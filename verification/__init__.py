"""Simulation, chaos tests and mutants: they show that the program keeps its promises. Not part of the wheel."""
