"""Measurements that anyone can repeat: each is a function that returns rows, and a command that prints them.

Speed is told as medians and ratios from real components; nothing here is imported by what it measures. It all imports
without torch and without the engines it compares with: those are loaded in processes of their own.
"""
