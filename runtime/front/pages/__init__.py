"""Serves the pages for people: the console, and `/docs`, which shows the API and sends requests.

Start reading at `console.py`. A page consists of a few files beside its module, which contain no data. A page requests
its data from the routes of `api`, with the API key that a user enters. The console also has a stream of its own. This
package must not import `api`.
"""
