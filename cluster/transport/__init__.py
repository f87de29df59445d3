"""How programs of a cluster reach each other: every channel and every server between them is made here.

In plaintext, or, where `tls` is set, over mutual TLS, with a shared token where there is one. There is no way from the
second back to the first: a program with certificates neither calls nor answers one without.
"""
