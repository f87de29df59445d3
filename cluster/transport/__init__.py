"""Connections between the programs of a cluster: every channel and every server between them is made here.

They use plaintext or, if `tls` is set, mutual TLS, with a shared token if there is one. TLS never falls back to
plaintext: a program with certificates neither calls nor answers one without.
"""
