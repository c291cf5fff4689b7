"""The plugin asgi: web apps as functions (ASGI, and WSGI through a2wsgi), with streams and WebSockets."""
