"""The three programs as a Ray Serve application: Ray places, watches and replaces them; tokens stay on their own gRPC.

Every Serve replica is an actor that runs one program as a child process and watches it. Only the modules that talk to
Ray import it.
"""
