"""The gateway, `chairlift route`: one OpenAI endpoint in front of servers anywhere.

It chooses a server for each request by the same policies as the server chooses an engine, passes bodies and streams
through unchanged, and has no model, no tokenizer and no torch.
"""
