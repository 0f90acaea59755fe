"""Routes of Anthropic's API, on the servers of the tests of OpenAI's."""
