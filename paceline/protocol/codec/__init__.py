"""The only conversion between protobuf messages and domain objects.

`encode_*` turns a domain object into its message, `decode_*` turns a message
into a domain object and checks it: whatever a decoder returns is within its
limits, and what is not raises `InvalidInput` naming field, value and limit.
Values that the wire holds as float32 (temperature, top_p, q …) come back
rounded to float32; encoding them again changes nothing, so every process
behind the first hop sees the same bits.
"""

from __future__ import annotations

from paceline.protocol.codec import draft, generation, parts, target

encode_hello, decode_hello = parts.HELLO.encode, parts.HELLO.decode
encode_welcome, decode_welcome = parts.WELCOME.encode, parts.WELCOME.decode
encode_service_status, decode_service_status = parts.SERVICE_STATUS.encode, parts.SERVICE_STATUS.decode
encode_target_command, decode_target_command = target.COMMAND.encode, target.COMMAND.decode
encode_target_event, decode_target_event = target.EVENT.encode, target.EVENT.decode
encode_draft_command, decode_draft_command = draft.COMMAND.encode, draft.COMMAND.decode
encode_draft_event, decode_draft_event = draft.EVENT.encode, draft.EVENT.decode
encode_generate_request, decode_generate_request = generation.encode_request, generation.REQUEST.decode
encode_generate_event, decode_generate_event = generation.EVENT.encode, generation.EVENT.decode
decode_models = generation.decode_models
encode_model_description, decode_model_description = generation.MODEL.encode, generation.MODEL.decode
failure_of, error_of, session_id_of = parts.failure_of, parts.error_of, parts.session_id_of
