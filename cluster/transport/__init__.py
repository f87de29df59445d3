"""Connections between the programs of a cluster. This package makes all their channels and servers.

Connections use plaintext or, if `tls` is set, mutual TLS, with a shared token if one is configured. TLS never falls
back to plaintext: a program with certificates neither calls nor answers a program without certificates.
"""
