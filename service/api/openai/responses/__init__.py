"""``POST /v1/responses``: text by OpenAI's newer route, whole or as a stream of typed events. Its input is counted."""
