"""Simulation, chaos tests and mutants, which show that the program keeps its promises. Outside the wheel."""
