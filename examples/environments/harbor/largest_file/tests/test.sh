#!/bin/bash
named=0
removed=0
[ "$(cat /app/answer.txt)" = b.txt ] && named=1
[ -e /app/files/b.txt ] || removed=1
echo "{\"reward\": $((named * removed)), \"named\": $named, \"removed\": $removed}" > /logs/verifier/reward.json
