"""Reporting shared by all measurements: numbers, tables and the style of pictures.

Each measurement defines its own summary and table; nothing here depends on one of them.
"""
