{{- define "lmcache.name" -}}
{{- /* A Service's name has 63 characters at most, and "-vllm" follows. */}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) (contains .Chart.Name .Release.Name) | trunc 58 | trimSuffix "-" }}
{{- end }}

{{- define "lmcache.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "lmcache.labels" -}}
{{ include "lmcache.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "lmcache.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "lmcache.vllmImage" -}}
{{ .Values.vllm.image.repository }}:{{ .Values.vllm.image.tag | default (printf "%s%s" .Chart.AppVersion (ternary "" "-cpu" .Values.gpu.enabled)) }}
{{- end }}

{{/* The socket's directory as server and engine see it. In mode sidecar the server makes it inside a volume that the
     pod shares: the volume's own directory is open to all, which both sides refuse. */}}
{{- define "lmcache.runtimeDir" -}}
{{ ternary "/run/lmcache" "/run/lmcache/socket" (eq .Values.mode "node") }}
{{- end }}

{{/* What all pods have in common. */}}
{{- define "lmcache.pod" -}}
# With tiers, a stop of the server writes to them for up to 30 s.
terminationGracePeriodSeconds: 60
automountServiceAccountToken: false
# A Service named lmcache would set LMCACHE_PORT and others in every container.
enableServiceLinks: false
{{- if eq .Values.mode "node" }}
hostPID: {{ .Values.hostPID }}
{{- if and .Values.gpu.enabled .Values.gpu.hostIPC }}
hostIPC: true
{{- end }}
{{- else }}
shareProcessNamespace: true
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ int64 .Values.user }}
  runAsGroup: {{ int64 .Values.user }}
  fsGroup: {{ int64 .Values.user }}
  seccompProfile: { type: RuntimeDefault }
{{- if and .Values.gpu.enabled .Values.gpu.runtimeClassName }}
runtimeClassName: {{ .Values.gpu.runtimeClassName }}
{{- end }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{- define "lmcache.confined" -}}
allowPrivilegeEscalation: false
capabilities: { drop: [ALL] }
{{- end }}

{{/* mode node: what an engine's Deployment of one's own needs, as NOTES.txt shows it. */}}
{{- define "lmcache.enginePatch" -}}
apiVersion: apps/v1
kind: Deployment
metadata: { name: ENGINE }
spec:
  template:
    spec:
      {{- if .Values.hostPID }}
      hostPID: true
      {{- end }}
      enableServiceLinks: false
      securityContext: { runAsUser: {{ int64 .Values.user }}, runAsGroup: {{ int64 .Values.user }} }
      containers:
        - name: CONTAINER
          env:
            - { name: LMCACHE_RUNTIME_DIR, value: {{ include "lmcache.runtimeDir" . }} }
            # The user is not root, and this is its home. Models that were in /root/.cache are now looked for in
            # /home/lmcache/.cache: mount their volume there, or set HF_HOME. The user must be able to read it.
            - { name: HOME, value: /home/lmcache }
            - { name: USER, value: lmcache }
          volumeMounts: [{ name: lmcache-socket, mountPath: {{ include "lmcache.runtimeDir" . }} }]
      volumes:
        # Without a server on its node, the engine starts all the same and runs uncached.
        - name: lmcache-socket
          hostPath: { path: {{ .Values.socket.hostPath }}, type: DirectoryOrCreate }
{{- end }}
