{{/* The container of the server; it mounts the volumes `socket` and `tmp`. */}}
{{- define "lmcache.server" -}}
name: lmcache
image: {{ include "lmcache.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
args:
  - server
  - --l1-size-gb={{ .Values.l1SizeGb }}
  - --port={{ .Values.port }}
  - {{ printf "--http-host=%s" .Values.http.host | quote }}
  - --http-port={{ .Values.http.port }}
  # For the address of HTTP. Engines use the socket, which only this user can open.
  - --allow-remote
  {{- if .Values.l1HostPath }}
  - --l1-path=/var/lib/lmcache/l1/lmcache.l1
  {{- end }}
  {{- if .Values.tier.hostPath }}
  - --tier=dir:///var/lib/lmcache/tier?size_gb={{ .Values.tier.sizeGb }}
  {{- end }}
  {{- range .Values.extraArgs }}
  - {{ . | quote }}
  {{- end }}
env:
  - { name: LMCACHE_RUNTIME_DIR, value: {{ include "lmcache.runtimeDir" . }} }
  {{- if .Values.gpu.enabled }}
  - { name: NVIDIA_VISIBLE_DEVICES, value: all }
  - { name: NVIDIA_DRIVER_CAPABILITIES, value: "compute,utility" }
  {{- end }}
  {{- with .Values.extraEnv }}{{ toYaml . | nindent 2 }}{{- end }}
ports:
  - { name: http, containerPort: {{ .Values.http.port }} }
livenessProbe:
  httpGet: { path: /healthz, port: http }
  timeoutSeconds: 5
  failureThreshold: 6
{{- if eq .Values.mode "node" }}
# Not beside vLLM, which would get no requests while the server is not ready.
readinessProbe:
  httpGet: { path: /readyz, port: http }
  timeoutSeconds: 5
  periodSeconds: 5
{{- end }}
resources:
  requests:
    cpu: {{ .Values.cpuRequest | quote }}
    memory: {{ include "lmcache.memory" . }}
  # The limit covers all of L1 and what it takes besides. For locked memory there is none to set here: a pod has
  # that of the container runtime (LimitMEMLOCK= of its systemd unit; `ulimit -l` in the container shows it).
  limits:
    memory: {{ include "lmcache.memory" . }}
securityContext:
  {{- include "lmcache.confined" . | nindent 2 }}
  readOnlyRootFilesystem: true
volumeMounts:
  - { name: socket, mountPath: /run/lmcache }
  - { name: tmp, mountPath: /tmp }
  {{- with include "lmcache.nodeMounts" . | fromYamlArray }}{{ toYaml . | nindent 2 }}{{- end }}
  {{- with .Values.extraVolumeMounts }}{{ toYaml . | nindent 2 }}{{- end }}
{{- end }}

{{/* With each GiB of L1 come 2 MiB of page tables, and the index: 0.5 % covers both. */}}
{{- define "lmcache.memory" -}}
{{ addf (mulf .Values.l1SizeGb 1.005) .Values.memoryOverheadGb | mulf 1024 | ceil | int }}Mi
{{- end }}

{{/* mode node: where the container has the directories of the node, beside the socket's. */}}
{{- define "lmcache.nodeMounts" -}}
{{- if .Values.l1HostPath }}
- { name: l1-file, mountPath: /var/lib/lmcache/l1 }
{{- end }}
{{- if .Values.tier.hostPath }}
- { name: tier, mountPath: /var/lib/lmcache/tier }
{{- end }}
{{- end }}
