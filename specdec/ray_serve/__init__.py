"""Replicas on Ray Serve: one HTTP application in front of several engines. Ray itself is the extra `ray`."""
