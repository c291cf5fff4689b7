"""Serves the pages for people: the console, and `/docs`, which shows the API and sends requests.

Start reading at `console.py`. A page is a few files beside its module, and holds no data: apart from the console's own stream, it
asks the routes of `api`, with the API key that a user enters. This package must not import `api`.
"""
