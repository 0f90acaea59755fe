"""Processes of the tests that begin with the libraries loaded: forks of one parent, which imports them once per run.

Importing torch and transformers takes 7 s of CPU time, which each test worker and each server would spend again.
"""
