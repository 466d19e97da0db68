"""Declared rules as the reader: detectors, and the words of a hint."""
