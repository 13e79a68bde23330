"""Calls of tools in a model's text: the forms that families write, read as the text grows."""
