"""Proof that an artifact is what it says and that other programs open it.
It has static checks, engines in processes of their own, and the record.
"""
