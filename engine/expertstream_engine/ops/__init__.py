"""The arithmetic that models are written over: one protocol, and one module for each array library."""
