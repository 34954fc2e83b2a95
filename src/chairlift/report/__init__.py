"""What all measurements share to tell what they found: numbers, tables and the look of pictures.

A measurement keeps its own summary and its own table beside what it measures; nothing here knows any of them.
"""
